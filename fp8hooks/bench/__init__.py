"""`fp8hooks bench`: measurements, each runnable by anyone."""
