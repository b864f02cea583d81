// Package wire is Naru's wire code in Go; the benchmark prints it from the .proto files into a copy of this module.
package wire
