"""Other frameworks, each imported only where it is in use already."""
