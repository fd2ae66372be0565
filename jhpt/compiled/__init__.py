"""What a compiled program holds in memory, sends between devices and hides behind computation."""
