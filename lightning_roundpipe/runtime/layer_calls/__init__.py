"""What goes into a layer's call and comes out of it, and what its code does besides."""
