"""What a newcomer needs: layout, replica, tree and root, serving and fetching, backup, and whose history wins."""
