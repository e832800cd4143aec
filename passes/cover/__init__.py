"""Nothing of a run is lost: what matches do not account for is looked for again, or refused."""
