"""Methods that change the token vectors."""
