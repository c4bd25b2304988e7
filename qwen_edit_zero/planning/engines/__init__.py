"""What each engine holds and sends."""
