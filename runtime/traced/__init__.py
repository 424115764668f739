"""Programs as graphs: a redistribution of a traced tensor in torch's operators and functional collectives."""
