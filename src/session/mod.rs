//! One connected client: hello, its open requests, credits, cancel, quotas of its uid.
