"""What a block must allow before its run says anything: weights and code that can be read, and hosts that leave traces."""
