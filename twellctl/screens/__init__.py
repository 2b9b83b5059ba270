"""What a person sees: tables and results on stdout, progress and errors on stderr."""
