"""Images: decoded on demand, cropped, resized, flipped and coloured by numbers that somebody else draws."""
