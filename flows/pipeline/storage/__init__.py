"""Files in S3: published once, fetched and verified on other machines."""
