"""What a batch is, what its lines must be, and what it says of itself; decides, touches nothing."""
