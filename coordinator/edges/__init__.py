"""What touches the world: network, disk, clock."""
