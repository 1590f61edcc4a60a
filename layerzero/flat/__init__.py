"""What a sharded parameter is: layout, buffers, views. No autograd, no policy."""
