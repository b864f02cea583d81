"""What routers keep on disk for clients: records and files, in one folder that all routers share."""
