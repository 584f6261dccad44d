"""What the demonstration needs: a tiny model and a hub on loopback to fetch it from."""
