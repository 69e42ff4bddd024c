"""What fetching does to the requests that need no fetch."""
