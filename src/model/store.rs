//! Which models there are: names, files, one mapping per file identity.
