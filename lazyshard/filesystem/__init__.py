"""What one mount shows of a filesystem that two share: `lazyshard verify-filesystem` asks two sides."""
