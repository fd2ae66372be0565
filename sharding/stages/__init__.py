"""Plans of space=general: a program for each stage, on devices of its own."""
