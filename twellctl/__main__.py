from twellctl.cli import main

main()
