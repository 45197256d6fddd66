"""Did the weights arrive?"""
