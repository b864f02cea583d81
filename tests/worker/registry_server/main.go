// A real OCI registry for the tests of oci:// sources, in memory: go-containerregistry's, optionally behind a password.
package main

import (
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"

	"github.com/google/go-containerregistry/pkg/registry"
)

func main() {
	user := flag.String("user", "", "name that is asked for; empty: anybody may do anything")
	password := flag.String("password", "", "password of that name")
	flag.Parse()
	served := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr())
	log.Fatal(http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, given, _ := r.BasicAuth()
		if *user != "" && (name != *user || given != *password) {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED"}]}`, http.StatusUnauthorized)
			return
		}
		served.ServeHTTP(w, r)
	})))
}
