"""The network, written for one device. It never mentions a mesh and reshapes by head width, never by head count."""
