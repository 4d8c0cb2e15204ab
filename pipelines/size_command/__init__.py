"""`size`: settings put to the calculator, its answer on the screen and in a folder."""
