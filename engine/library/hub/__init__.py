"""The Hugging Face hub: finding models, and how they would fit before a byte of weights is fetched."""
