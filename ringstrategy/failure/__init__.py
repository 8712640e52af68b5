"""Find out which rank was lost, tell every other rank, and end what waits for it."""
