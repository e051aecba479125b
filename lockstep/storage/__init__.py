"""Files in object stores (S3, Google Cloud, Azure, Hugging Face), reached through fsspec."""
