//! Configuration: a TOML file and the command line over it.
