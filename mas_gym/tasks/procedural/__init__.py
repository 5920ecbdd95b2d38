"""Tasks with generated problems: Arithmetic, Ordering and the game of 24."""
