"""How it travels: the gRPC contract, sealed envelopes and the byte forms of artifacts."""
