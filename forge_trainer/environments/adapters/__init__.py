"""Other libraries' environments as this one's. Each library is imported when it is used."""
