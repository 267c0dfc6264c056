"""What answers at which path over HTTP."""
