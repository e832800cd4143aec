"""Graph passes: graph in, graph out."""
