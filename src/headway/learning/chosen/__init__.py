"""Learning from inputs one may choose: what to ask of a black box, so that few calls do."""
