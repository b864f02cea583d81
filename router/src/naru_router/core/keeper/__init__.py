"""Which copies of which models come and go between their least and their most, by load and by what is broken. Pure."""
