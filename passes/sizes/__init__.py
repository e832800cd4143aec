"""Where the sizes of recorded tensors come from."""
