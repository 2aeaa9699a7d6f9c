"""What a forward leaves behind besides its results."""
