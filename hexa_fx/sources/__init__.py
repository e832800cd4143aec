"""Where a block's expert weights come from besides its own parameters: adapters that are switched while the model runs."""
