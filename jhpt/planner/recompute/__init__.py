"""What a backward pass finds kept, what it fetches from the host, and what it computes again."""
