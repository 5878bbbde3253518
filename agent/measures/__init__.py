"""What a synthetic set is worth: fidelity, utility, information loss. Every number names what it was measured by."""
