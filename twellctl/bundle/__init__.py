"""What an export carries: these files travel, byte for byte, and never import twellctl."""
