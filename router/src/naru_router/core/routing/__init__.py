"""Which of the workers that have a model ready gets a request."""
