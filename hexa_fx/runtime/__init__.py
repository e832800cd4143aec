"""What stays with a rewritten model: its new forward, its packed weights and its guards."""
