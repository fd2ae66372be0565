"""What lives on the host, and when it is fetched."""
