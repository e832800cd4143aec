"""Optional: what hexa_fx does for other libraries. Nothing here is imported unless asked for."""
