"""Tasks with generated problems: Arithmetic and Ordering."""
