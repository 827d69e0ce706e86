//! Listener, peer credentials, bytes to frames and back, limits. Knows no models.
