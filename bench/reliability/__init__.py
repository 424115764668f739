"""What ranks do when others die, stall or fail, and after hundreds of thousands of calls."""
