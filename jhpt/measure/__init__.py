"""What the machine at hand is and how fast it runs."""
