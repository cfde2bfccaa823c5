"""Work under the accounts of local users."""
