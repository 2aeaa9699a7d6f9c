"""What the server tells of itself: metrics, the last minutes, the last steps, the status page."""
