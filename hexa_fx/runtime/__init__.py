"""What stays with a rewritten model: its new forward, its packed weights, its guards."""
